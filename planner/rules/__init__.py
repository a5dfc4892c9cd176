"""The rules of legality by subject; ``planner.legality`` is the door."""
