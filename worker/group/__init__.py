"""Groups: several processes of one machine that are one worker."""
