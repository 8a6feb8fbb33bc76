"""What a crash during a save may leave on the disk: recorded, enumerated, loaded and counted."""
