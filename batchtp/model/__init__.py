"""Model files: what a checkpoint is, which part of it a rank owns, and the decoder that runs it."""
