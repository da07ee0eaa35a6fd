"""What training the drafter in idle time brings over a run."""
