"""Which strategy the next round uses, learnt from measured costs and acceptance."""
