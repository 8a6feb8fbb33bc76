"""Write rows to the trackers that a team already uses."""
