"""What a run would take on hardware that need not be there: memory, arithmetic, traffic, time and price of its training step."""
