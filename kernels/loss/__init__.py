"""The loss of distilling the policy into the drafter."""
