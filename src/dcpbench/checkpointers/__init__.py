"""Implementations of save and load: DCP with its save modes and storages, `torch.save`, a user's trainer."""
