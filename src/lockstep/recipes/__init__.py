"""The trainings that ship with Lockstep, each readable in one sitting."""
