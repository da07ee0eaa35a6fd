"""Training of the drafter in the idle time of workers, and the decision whether it is published."""
