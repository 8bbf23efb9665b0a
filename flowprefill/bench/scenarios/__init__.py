"""What operators of LLM servers have been burnt by, where a time is judged: a bar for each."""
