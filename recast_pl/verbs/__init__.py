"""What the command line does where Lightning has no verb for it."""
