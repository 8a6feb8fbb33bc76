"""Who starts ranks, sends them a cell, limits them in time and ends them."""
