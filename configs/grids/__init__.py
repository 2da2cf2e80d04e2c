"""Grids that come with gammalm: each file describes many configs at once (`gammalm grid --config grids/NAME`)."""
