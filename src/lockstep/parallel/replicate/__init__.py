"""Data parallelism: replicas (DDP) and shards (FSDP, ZeRO), and the statistics that all data ranks share."""
