"""The device mesh, the tables of sharding rules, and what devices exchange."""
