"""What turns text into token ids and back: one module for each format of files, and chats made of templates."""
