"""From responses to a policy step: rewards, advantages, loss, the two update back ends."""
