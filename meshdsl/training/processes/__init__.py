"""The processes of a job: they meet, agree, look after each other, and part."""
