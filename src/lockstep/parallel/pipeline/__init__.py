"""Pipeline parallelism: stages, their timetable, and the activations that are sent between them."""
