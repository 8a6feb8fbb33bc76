"""The process of one rank: it joins the group, runs cells and reports."""
