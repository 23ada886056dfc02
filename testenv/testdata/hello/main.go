// Command hello is built by the tests of testenv.
package main

import "fmt"

func main() { fmt.Println("hello") }
