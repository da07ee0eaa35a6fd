"""This computer: what it has, what it computes in, and the settings of a process."""
