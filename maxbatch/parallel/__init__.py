"""The devices of a run: their mesh, the sharding of arrays, the pipeline over stages, the hosts."""
