"""Disjoint multiprocessors (SMs) for two processes that compute on one GPU at the same time. No torch."""

from rollplex.multiprocessors.beside import Beside, Notice, Silent, Watch
from rollplex.multiprocessors.cut import Side, cut
from rollplex.multiprocessors.shares import Multiprocessors

__all__ = ["Beside", "Multiprocessors", "Notice", "Side", "Silent", "Watch", "cut"]
