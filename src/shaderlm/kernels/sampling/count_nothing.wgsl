// The end of sampling where tokens are not counted. Exports: count_token(). Same function as count_token.

fn count_token(slot: u32, token: u32) {
}
