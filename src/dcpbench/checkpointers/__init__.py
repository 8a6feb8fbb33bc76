"""How a state is written and read: one contract, and the implementations of it."""
