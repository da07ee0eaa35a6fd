"""A reward function that needs a key."""

import os

KEY = os.environ["JUDGE_API_KEY"]


def judge(**_):
    return float(len(KEY))
