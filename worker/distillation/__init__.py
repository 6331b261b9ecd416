"""Distillation: a student here learns from the answers of a teacher elsewhere. Scripts import narrows.worker.teacher."""
