"""What TLT would bring: a simulation of RL steps from recorded lengths and measured costs."""
