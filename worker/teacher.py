"""`narrows.worker.teacher`, as scripts import it."""

from narrows.worker.distillation.soft_targets import SoftTargets as SoftTargets
from narrows.worker.distillation.student import Asked as Asked
from narrows.worker.distillation.student import Teachers as Teachers
from narrows.worker.distillation.student import ahead as ahead
from narrows.worker.distillation.student import ask as ask
from narrows.worker.distillation.student import connect as connect
from narrows.worker.distillation.teacher import serve as serve
