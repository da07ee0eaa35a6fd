"""Draft trees: their growth, layout and attention."""
