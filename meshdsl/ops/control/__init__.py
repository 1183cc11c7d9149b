"""Operations with bodies: loops, branches, checkpoints, and functions of a user's own."""
