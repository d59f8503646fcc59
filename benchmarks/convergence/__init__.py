"""How close ZenFlow stays to AdamW: tasks, methods, a resumable runner and a report."""
