"""The device mesh and the table of sharding rules."""
