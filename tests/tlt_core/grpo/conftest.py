"""Tiny tensors gain nothing from threads, and on a busy machine threads that wait for each other cost seconds."""

import torch

torch.set_num_threads(1)
