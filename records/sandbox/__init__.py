"""Records run here: what they can see, what they may use, and how the referee asks them."""
