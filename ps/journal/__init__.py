"""The journal of a server process: its machine as it was once, and each event since."""
