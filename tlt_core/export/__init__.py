"""Policy and drafter as folders for serving, and the checks that they fit each other."""
