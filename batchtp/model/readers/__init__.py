"""One reader a checkpoint format: each turns a run of one linear into the internal layout."""
