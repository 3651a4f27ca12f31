"""Stand-ins that keep to the real protocols: a fake engine, and a fake rank process."""
