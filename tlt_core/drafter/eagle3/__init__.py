"""The EAGLE-3 drafter: a network that reads the policy's hidden states."""
