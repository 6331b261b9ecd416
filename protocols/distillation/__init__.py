"""Distillation: a teacher in one place answers for the samples of students in others. The machines of both; no I/O."""
