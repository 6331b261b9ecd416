"""The bounds that a teacher and its students hold each other to."""

from __future__ import annotations

from narrows.protocols.effects import NS

LEASE_NS = 10 * NS  # silence after which the other side is lost; a slow link has longer
CUT_NS = 2 * NS  # after the end of a connection without a new one, the other side is lost
STUCK_NS = 900 * NS  # a teacher that is live and answers none of its open requests for so long is lost
BEATS = 10  # heartbeats in a lease
CREDIT = 32  # requests that a student may have open at one teacher
REQUEST_BYTES_MAX = 16 << 20  # payload of one request
ANSWER_BYTES_MAX = 64 << 20  # payload of one answer
SAMPLES_MAX = 1 << 12  # samples of one request
FIELDS_BYTES_MAX = 1 << 14  # of a request: names, types and shapes of its tensors
OPEN_BYTES_MAX = 64 << 20  # payloads of the requests that a student has open at one teacher, if it has several
QUEUE_BYTES_MAX = 256 << 20  # of all requests that a teacher has open; one more is dropped, and sent again later
ENTRY_BYTES = 1 << 10  # of an answer beside its payload
UNREAD_BYTES_MAX = 512 << 20  # of all answers of a teacher that no beat of a student has confirmed
CONFIRM_BYTES = 8 << 20  # of answers, after which a student sends a beat at once
ASKED_BYTES_MAX = 256 << 20  # payloads of a student's requests without an answer; the next one waits
UNTAKEN_BYTES_MAX = 1 << 30  # answers that a script has asked for and not taken
STRIKES_MAX = 256  # messages of a teacher in a row that a student did not ask for; it is asked no more
HELLOS_MAX = 8  # hellos without a welcome, after which a student makes the connection anew
STUDENTS_MAX = 256  # students of one teacher
TEACHERS_MAX = 64  # teachers of one student
AHEAD_MAX = 256  # requests of a student without an answer; the next one waits
CLASSES_MAX = 1 << 24  # classes of a model: the largest vocabularies have some 2**18
POSITIONS_MAX = 8  # dimensions of a sample's predictions
TEMPERATURE_LEAST, TEMPERATURE_MOST = 0.01, 100.0
