"""Commands that are killed, stopped and starved at moments drawn at random, each in a process of its own."""
