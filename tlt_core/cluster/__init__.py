"""Ray workers, the dispatcher that feeds them, and the nodes that they run on."""
