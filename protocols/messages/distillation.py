"""A student asks a teacher for the soft targets of samples: two processes that train nothing together.

    student                                  teacher
      TeacherHello     ------------------>            which coding, at which temperature
                       <-----------------   TeacherWelcome   how many requests may be open
      TeacherRequest 0 ------------------>            inputs of some samples
      TeacherRequest 1 ------------------>
                       <-----------------   TeacherAnswer 0  top K log-probabilities of each token
      TeacherBeat      <----------------->   TeacherBeat      what is open, several times in a lease

How it works
1. A student keeps a request until its answer is here. It sends all open requests again over a new connection, and those
   that the teacher's beat does not have although a later one has arrived.
2. A request may be answered twice, and by any teacher: its answer follows from its content alone.
3. The messages of a teacher to one student arrive in the order of their sending. So a beat tells which answers came before.
   In the same way a student's beat confirms the answers that it has read.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols.messages.base import Buffer, Ints, Message, Name


@dataclass(frozen=True, slots=True)
class TeacherHello(Message):
    """Student to teacher: the student is there, and how it wants its answers."""

    student: int  # random number of the student's process
    coding: Name  # of the answers, such as top:32+int8
    temperature: float  # by which the teacher divides its logits


@dataclass(frozen=True, slots=True)
class TeacherWelcome(Message):
    """Teacher to student: the student may ask."""

    student: int
    teacher: int  # random number of the teacher's process
    credit: int  # requests that the student may have open
    samples: int  # of the teacher's own dataset, which a request may name by index; 0: it has none


@dataclass(frozen=True, slots=True)
class TeacherRequest(Message):
    """Student to teacher: the inputs of some samples."""

    student: int
    number: int  # of this request, counted by the student from 0 on
    samples: int
    fields: bytes  # what the payload holds, packed; the list is empty: int64 indices into the teacher's dataset
    payload: Buffer


@dataclass(frozen=True, slots=True)
class TeacherAnswer(Message):
    """Teacher to student: the soft targets of one request."""

    student: int
    teacher: int
    number: int  # of the request
    classes: int  # of the model; 0: the request has no answer, and `text` says why
    positions: Ints  # shape of a sample's predictions, as (tokens,); (): the model makes one prediction for a sample
    text: Name  # one sentence, "": there is an answer
    payload: Buffer  # compression/logits


@dataclass(frozen=True, slots=True)
class TeacherBeat(Message):
    """Either way: the sender is live."""

    student: int
    teacher: int
    seen: int  # the highest number of a request that the teacher has had from this student; -1: none
    open: Ints  # numbers of the requests that are not answered
    left: bool  # the sender ends, and hears no more
