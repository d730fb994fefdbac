"""Drawing: pictures of what each device holds, and of the communication between devices."""
