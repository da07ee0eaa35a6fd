"""What travels between the parts, and how it is saved."""
