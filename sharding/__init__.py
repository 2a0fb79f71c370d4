"""The device mesh, the table of sharding rules, and the processes."""
