"""A user module that ends its process when it is imported."""

import os

os._exit(3)
