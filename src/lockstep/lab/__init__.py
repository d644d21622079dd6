"""How it works inside, shown on real ranks: collectives, who holds what of a model, pipeline timetables."""
