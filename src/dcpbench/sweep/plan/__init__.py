"""What a sweep would do: its cells composed, which can run, how long and how much room they take."""
