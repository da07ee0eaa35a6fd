"""Configuration: every setting with its bounds and its meaning, one file a subsystem."""
