"""The policy's network, its files, and the one definition of its probability."""
